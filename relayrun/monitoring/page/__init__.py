"""The report of runs as one HTML file: no network, no script, readable on a phone, in the dark and on paper.

gather      all that a page shows of a run, read once
document    the page
sections    its parts, as markup
chart       lines, bands and bars as inline SVG, with labels in HTML
series      many points as few: the least and the greatest of each pixel
style       the style sheet
markup      elements; text is always escaped
"""
